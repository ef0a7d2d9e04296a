"""Pictures: the space-time diagram of a plan, and curves that compare algorithms. Needs matplotlib."""
