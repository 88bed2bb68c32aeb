"""Pure maths: losses, advantages and divergences. Imports torch and nothing else."""
