"""HDF5 files: opened, checked for links, read and written."""
