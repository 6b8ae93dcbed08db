"""The data of collectives: arrays of every library, their shapes, and how they are reduced."""
