"""Reports as text for a terminal and as HTML for a notebook."""
