"""A verdict for people: page, pictures, tables."""
