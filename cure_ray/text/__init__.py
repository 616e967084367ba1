"""Sentences: read, encoded, and attacked word by word. What is proven is about the head on the encoder's output, never about words."""
