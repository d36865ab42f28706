"""Data: files -> rows -> prompts or supervised sequences -> `DataProto`."""
