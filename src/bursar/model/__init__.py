"""The pure model: decisions about money, made with plain values. No IO, no clock, no randomness, no await."""
