"""Episodes: the policy acts in an environment over several turns, token by token."""
