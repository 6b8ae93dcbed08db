"""The classic wire, which ranks of ferrotorch can join: worlds, lanes and the star backend."""
