"""One typed tree of settings, where their values come from, and the page that lists them."""
