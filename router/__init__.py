"""router: the public HTTP surface. Lives in text; knows clusters only as URLs that take token ids."""
