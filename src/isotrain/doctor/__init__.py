"""Facts about a machine -> findings -> fixes; torch is never imported in this process."""
