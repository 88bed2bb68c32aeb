"""Device memory that several processes share."""
