"""Search-R1: a policy that searches while it reasons."""
