"""The operations of a rank: its journal, places in the user's program, and the fingerprints that ranks compare."""
