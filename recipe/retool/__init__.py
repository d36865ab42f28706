"""ReTool: a policy that runs Python while it reasons."""
