"""What is saved: rules, operator tags, and the action that they mean for each equation."""
