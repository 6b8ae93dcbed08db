"""The mesh of the classic wire, which a rank written in Rust can join."""
