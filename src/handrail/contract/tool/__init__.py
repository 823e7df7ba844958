"""What is a tool? Its spec, its manifest, its names, what it requires, and how a function becomes one."""
