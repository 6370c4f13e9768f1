"""The expert layer over weights that stay packed in MXFP4."""
