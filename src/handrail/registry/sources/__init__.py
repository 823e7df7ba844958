"""The sources that tools come from: code, folders, programs and packages."""
