"""What collectives work on: arrays of every library, their shapes, and how they are reduced."""
