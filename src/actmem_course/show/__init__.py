"""Tables of labs, as text."""
