"""Meshes, plans, collectives and launchers."""
