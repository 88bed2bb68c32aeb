"""What a recipe needs of devices, before one is taken."""
