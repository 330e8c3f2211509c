"""Small studies over seeds on the digits: whether a setting helps where it says that it does."""
