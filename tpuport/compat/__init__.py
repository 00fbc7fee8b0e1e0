"""Running other people's code unedited: what `porting()` installs and takes back."""
