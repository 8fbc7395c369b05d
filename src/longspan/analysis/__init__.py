"""Pictures of what a model looks at and how far it sees, and the report that gathers them."""
