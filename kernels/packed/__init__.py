"""Products with weights that stay packed, as codes with scales: linear layers and experts."""
