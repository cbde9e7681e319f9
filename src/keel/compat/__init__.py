"""Other libraries' names on Keel's kernels."""
