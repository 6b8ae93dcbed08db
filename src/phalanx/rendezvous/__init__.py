"""How a world forms, and how it notices a loss: directory, handshakes, liveness."""
