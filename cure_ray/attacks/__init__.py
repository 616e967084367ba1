"""Attacks: a search for misclassified images of a ball in float32 on any device, and the replay in float64 that makes one a witness."""

from cure_ray.attacks.losses import margin
from cure_ray.attacks.search import attack
from cure_ray.attacks.settings import STRENGTHS, AttackSettings, attack_settings
from cure_ray.attacks.witness import Witnesses, check_witness, replay_network

__all__ = ["STRENGTHS", "AttackSettings", "Witnesses", "attack", "attack_settings", "check_witness", "margin", "replay_network"]
