"""The commands, one module for each group of them; none is imported before it is used."""
