"""The mesh: one connection, or shared memory, between every two ranks."""
