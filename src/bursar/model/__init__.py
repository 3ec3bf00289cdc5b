"""The pure model: what is right, decided with plain values. No IO, no clock, no randomness, no await."""
