"""The smallest settings with which the site runs."""

import os

SECRET_KEY = os.environ.get("SECRET_KEY", "only for this example")
ALLOWED_HOSTS = ["127.0.0.1"]
INSTALLED_APPS = ["shop"]
ROOT_URLCONF = "shop.urls"
PENSTOCK_BROKER = os.environ.get("PENSTOCK_BROKER", "data")
