"""CURE training: regions, losses, regularisers, schedules, epochs, gradient projection. Pure torch; no files, no Ray."""
