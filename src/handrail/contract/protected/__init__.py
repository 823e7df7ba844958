"""Protected names: files that tools may not write, or only with an approval or a rule that names them."""
