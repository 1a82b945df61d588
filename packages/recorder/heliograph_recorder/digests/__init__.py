"""Digests of what each batch was and did, so that two recorded runs can be compared."""
