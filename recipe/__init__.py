"""Published methods as edits of the flow, each in a folder with its settings, a run script and its paper."""
