"""Reading compiled programs: their text, and what devices exchange in them."""
