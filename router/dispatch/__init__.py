"""From an API request to its sequences on workers: waiting, dispatch, re-dispatch, cancel."""
