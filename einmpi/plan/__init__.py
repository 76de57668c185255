"""HOW to cut it: meshes, layouts, volumes, strategies, plans. Knows the rank count; numpy for tables only."""
