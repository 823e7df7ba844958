"""Programs that show Handrail at work; `make run`, `make doors` and `make agents` start them. They are not part of the package."""
