"""What a policy needs in other libraries: one file for each of them."""
