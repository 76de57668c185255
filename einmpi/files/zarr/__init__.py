"""zarr v3 stores: folders with the metadata of arrays in JSON, and a file for each chunk."""
