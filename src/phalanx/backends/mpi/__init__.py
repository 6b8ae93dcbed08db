"""The MPI backend. Loads MPI's library when a backend is made, not when it is imported."""
