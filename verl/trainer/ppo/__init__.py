"""Policy optimization: its flow, its operators, and edits of the flow."""
