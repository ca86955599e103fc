"""Killing the loop at every write: the shim that counts and kills, and the run that it is tried on."""
