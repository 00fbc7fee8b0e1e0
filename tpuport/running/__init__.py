"""Running other people's code as it is: what `porting()` puts in force and takes back."""
