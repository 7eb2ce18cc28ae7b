"""What the documents take from code and results: pictures, tables, the list of commands."""
