"""One pipe between two ranks: streams, channels, and the mailboxes where messages meet receives."""
