"""The only rooms that name a vendor: everything in which devices differ."""
