"""Worker groups in this process and in processes of this host."""
